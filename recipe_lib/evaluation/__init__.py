"""Evaluation of a trained model on held-out samples: likelihoods, answers, metrics, and how they
are shown.
"""
