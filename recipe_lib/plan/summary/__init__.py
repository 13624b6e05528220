"""What traces of simulated ranks come to: memory, verdict, time, communication, assumptions."""
