"""How their learning rates over the steps differ: torchtune's schedules are transformers', and so are the Trainer's."""

WARM_UP = "each step of the warm-up has the rate that theirs has one step later: the first trains, there at a rate of 0"
