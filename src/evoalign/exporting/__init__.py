# SPDX-License-Identifier: Apache-2.0
"""A run's mean as others load it, with a model card."""
