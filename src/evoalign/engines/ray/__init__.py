# SPDX-License-Identifier: Apache-2.0
"""Engine `ray`: replicas of another engine, each in a Ray actor, share the members of a population."""
