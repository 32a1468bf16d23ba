# SPDX-License-Identifier: Apache-2.0
"""Which problems models solve in many tries, by temperature and by noise on the weights."""
