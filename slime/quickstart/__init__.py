"""The guided first run: a tiny model from scratch, a short SFT warm-up, GRPO, and a table of what it brought."""
