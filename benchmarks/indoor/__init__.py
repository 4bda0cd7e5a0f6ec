"""A walker's place from Wi-Fi."""
