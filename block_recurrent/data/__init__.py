"""Documents in, batches out.

documents                       what a corpus is: units, documents in them, what was dropped
sources, books, running_text,   the corpora: text files and the standard library; PG19 and Gutenberg; enwik8, WikiText,
arxiv, github                   Billion Word and Penn Treebank; arXiv (with latex); GitHub (with repositories,
                                git_directories, code_tables, source_files, licences)
reviews                         documents to be classified: IMDB
images, music                   what is no text: MNIST, to be classified too, and piano rolls
registry                        their names, and the vocabulary each is read with
vocabulary, train_vocabulary    text to tokens and back
signals                         the same for what is no text
building                        a store in three steps (with settling and near_duplicates), run by pool or by beam
store, mixing, looking          what comes out, mixtures of it, and a look at it
rows                            batches: each row reads its own documents in order
tasks                           the same for seqio
files                           folders and buckets
"""
