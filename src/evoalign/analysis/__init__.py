# SPDX-License-Identifier: Apache-2.0
"""What a training did to a model, beyond its reward."""
