# SPDX-License-Identifier: Apache-2.0
"""How many completions look as if their reward was earned without the task."""
