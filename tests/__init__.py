"""The tests mirror the rooms of megatron_lite; helpers stand in tests/support/."""
