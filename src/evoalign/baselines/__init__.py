# SPDX-License-Identifier: Apache-2.0
"""Other methods on the same tasks, in the same run directories. TRL is imported in `trainer` alone."""
