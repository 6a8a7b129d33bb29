"""What ZeRO++ is compared with: other libraries, and FSDP2 as others use it."""
