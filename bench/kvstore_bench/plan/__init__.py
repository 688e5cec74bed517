"""kvstore-bench plan: SSD, bandwidth, drives, NICs and prefill instances that a load needs: computed, not measured."""
