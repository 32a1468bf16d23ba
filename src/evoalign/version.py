# SPDX-License-Identifier: Apache-2.0
"""The version, where both the package and the manifest find it."""

__version__ = "0.1.0"
