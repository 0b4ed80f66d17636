//! Loops compiled for the processor at hand.
//!
//! Responsible for the choice between a loop for any processor and the same loop for one with wider registers. The
//! arithmetic is the same in both, operation by operation, so the bits are: nothing is fused, nothing is reordered. Not
//! responsible for the loops.

/// Generates the choice between a loop that is inlined here and the same for a processor that this is.
macro_rules! fastest {
    ($name:ident, $plain:ident, $($argument:ident: $type:ty),*) => {
        fn $name($($argument: $type),*) {
            #[cfg(target_arch = "x86_64")]
            {
                #[target_feature(enable = "avx2")]
                fn wider($($argument: $type),*) {
                    $plain($($argument),*);
                }
                if is_x86_feature_detected!("avx2") {
                    #[expect(unsafe_code, reason = "a function for a processor that this is")]
                    // SAFETY: the processor has what the function is compiled for.
                    unsafe {
                        wider($($argument),*);
                    }
                    return;
                }
            }
            $plain($($argument),*);
        }
    };
}

pub(crate) use fastest;
