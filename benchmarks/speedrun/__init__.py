"""The smallest time to a fixed loss on Tiny Shakespeare, by rules that anybody can follow; see README.md."""
