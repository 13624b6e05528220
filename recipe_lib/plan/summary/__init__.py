"""Sum up the traces of simulated ranks: memory and its verdict, time, communication."""
