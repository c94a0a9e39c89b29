"""Look inside a trained model: capture and patch intermediates, and draw them (docs/inspect.md)."""

from lm.interpret.intermediates import capture, logit_lens, names, patch

__all__ = ["capture", "logit_lens", "names", "patch"]
