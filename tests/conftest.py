"""Settings of the whole suite."""

import os

import hypothesis
import jax

# Products in full float32 (GPUs would use TF32), so that one set of tolerances holds everywhere.
jax.config.update("jax_default_matmul_precision", "highest")
# No compiled program comes from outside this process: within it jit's own cache serves, and a test never runs what
# another version of the code or of jax compiled.
jax.config.update("jax_compilation_cache_dir", None)

# On a shared machine a deadline is a test of its load.
hypothesis.settings.register_profile("lm", deadline=None, print_blob=True)
hypothesis.settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "lm"))
