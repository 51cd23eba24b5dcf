"""`anabranch processor`: processors, their tasks and how far they are behind."""
