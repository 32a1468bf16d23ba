# SPDX-License-Identifier: Apache-2.0
"""Whether trainings changed the same weights in the same direction, and the shape of the changes."""
