"""Parts shared by the text applications: word tables, selection of words, stored files, insight."""
