"""Other nodes: who lives, what they have, how bytes come from them."""
