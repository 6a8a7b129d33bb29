"""The families of dense models, in files of families that are much alike."""
