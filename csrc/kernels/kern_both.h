/* Functions that are compiled for the host and, by nvcc, for the device too. */
#ifndef FC_KERNELS_KERN_BOTH_H
#define FC_KERNELS_KERN_BOTH_H

/* nvcc inlines them always: arguments that are constants where they are called choose what is left
 * of a body. gcc may keep them whole; forced to the same, it took 15 s where it takes one. */
#ifdef __CUDACC__
#define FC_BOTH static __host__ __device__ __forceinline__
#define FC_PRAGMA(text) _Pragma(#text)
#define FC_UNROLL _Pragma("unroll")
#define FC_UNROLL_BY(n) FC_PRAGMA(unroll n)
#else
#define FC_BOTH static inline
#define FC_UNROLL
#define FC_UNROLL_BY(n)
#endif

#endif
