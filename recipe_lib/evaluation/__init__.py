"""Evaluate a trained model on held-out samples: likelihoods, answers, metrics, their display."""
