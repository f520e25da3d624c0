"""The protocol buffer packages of Likeness."""
