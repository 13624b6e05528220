"""Learning rates over the steps, and how theirs differ: torchtune's schedules are transformers', and so the Trainer's."""

WARM_UP = "each step of the warm-up has the rate that theirs has one step later: the first trains, there at a rate of 0"
