/* Functions that are compiled for the host and, by nvcc, for the device too. */
#ifndef FC_KERNELS_KERN_BOTH_H
#define FC_KERNELS_KERN_BOTH_H

#ifdef __CUDACC__
#define FC_BOTH static __host__ __device__ __forceinline__
#else
#define FC_BOTH static inline
#endif

/* Inlined whatever the compiler thinks: arguments that are constants where it is called choose
 * what is left of the body. */
#ifdef __CUDACC__
#define FC_BOTH_INLINE FC_BOTH
#define FC_UNROLL _Pragma("unroll")
#else
#define FC_BOTH_INLINE static inline __attribute__((always_inline))
#define FC_UNROLL _Pragma("GCC unroll 8")
#endif

#endif
