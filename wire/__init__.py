"""What the processes say to each other: message types, links, block keys, and the frame of a child process."""
