/* What a call in the core answers: one status, and the sentence that goes with a failure.
 *
 * The function that decides on an error records its message with fc_fail(); callers pass the
 * status on unchanged. Threading: multi; the last message is kept per thread.
 */
#ifndef FC_BASE_STATUS_H
#define FC_BASE_STATUS_H

#ifdef __cplusplus
extern "C" {
#endif

#define FC_STATUS_MAP(X)                                                                           \
    X(OK, 0, "success")                                                                            \
    X(AGAIN, 1, "not yet")                                                                         \
    X(ERR_INVALID, -1, "invalid argument")                                                         \
    X(ERR_NOMEM, -2, "out of memory")                                                              \
    X(ERR_SYSTEM, -3, "system call failed")                                                        \
    X(ERR_TIMEOUT, -4, "peer did not arrive in time")                                              \
    X(ERR_PEER, -5, "peer is gone")                                                                \
    X(ERR_MISMATCH, -6, "ranks disagree")                                                          \
    X(ERR_UNSUPPORTED, -7, "not supported")                                                        \
    X(ERR_BROKEN, -8, "communicator is broken")                                                    \
    X(ERR_INTERRUPTED, -9, "interrupted")                                                          \
    X(ERR_STATE, -10, "illegal in this state")                                                     \
    X(ERR_GROUP, -11, "a collective of the process group failed")

typedef enum fc_status {
#define FC_STATUS_ENUM(name, value, text) FC_##name = (value),
    FC_STATUS_MAP(FC_STATUS_ENUM)
#undef FC_STATUS_ENUM
} fc_status;

#define FC_MUST_CHECK __attribute__((warn_unused_result))
#define FC_MESSAGE_BYTES 1536

/* Records a formatted message for this thread and returns `status`. */
fc_status fc_fail(fc_status status, const char *format, ...) __attribute__((format(printf, 2, 3)));

/* As fc_fail, with the text of errno `code` appended. */
fc_status fc_fail_errno(fc_status status, int code, const char *format, ...)
    __attribute__((format(printf, 3, 4)));

/* The message of this thread's last failure; borrowed until its next failure. */
const char *fc_last_message(void);

/* Static text of a status. */
const char *fc_status_text(fc_status status);

/* Returns the status of `call` to the caller unless it is FC_OK. Only where nothing needs undoing.
 */
#define FC_TRY(call)                                                                               \
    do {                                                                                           \
        fc_status fc_try_status_ = (call);                                                         \
        if (fc_try_status_ != FC_OK) {                                                             \
            return fc_try_status_;                                                                 \
        }                                                                                          \
    } while (0)

#ifdef __cplusplus
}
#endif
#endif
