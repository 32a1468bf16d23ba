# SPDX-License-Identifier: Apache-2.0
"""What became of a model beside the task that it was trained on."""
