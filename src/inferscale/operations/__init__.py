"""What an operator does with a data folder: audit it, copy it, put it back, embed it anew."""
