/* Message transport: collectives of somebody else's process group. */
#include "transport/transport_impl.h"

fc_status fc_callback_create(const fc_transport_config *config, const fc_message_ops *ops,
                             fc_transport **out)
{
    fc_transport *t;

    if (ops->all_gather == NULL || ops->reduce_scatter == NULL || ops->all_reduce == NULL ||
        ops->broadcast == NULL || ops->all_to_all == NULL || ops->barrier == NULL) {
        return fc_fail(FC_ERR_INVALID, "a message transport needs all of its collectives");
    }
    FC_TRY(fc_transport_alloc(config, &t));
    t->messages = *ops;
    *out = t;
    return FC_OK;
}
