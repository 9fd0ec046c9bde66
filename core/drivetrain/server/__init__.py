"""HTTP front end, the loop's process, and the messages between them. Loads without torch."""
