"""Demonstrations of Regard: pretrained models, applications on real data, and a comparison of
attention mechanisms.
"""
