"""What proves Regard: pretrained models, applications on real data, and a comparison of mechanisms."""
