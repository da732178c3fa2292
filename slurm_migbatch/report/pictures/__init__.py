"""The page of pictures: sums over the record in bins of time, charts of them, and the HTML that holds it all."""
