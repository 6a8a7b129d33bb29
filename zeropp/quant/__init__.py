"""How numbers become INT8 and INT4 codes and numbers again, on every device."""
