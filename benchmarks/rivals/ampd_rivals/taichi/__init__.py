"""TaiChi (arXiv 2508.01989): instances that all prefill and decode, some better at one of the two.

The source has prefill-heavy and decode-heavy instances. They differ in the size of their prefill chunks. Here a mixed
worker (or a prefill worker) is prefill-heavy, and a decode worker is decode-heavy.
"""
