// What the core asks of a process group, by c10d itself: collectives of units on a device, messages
// between two ranks, signs of life in its store.
#ifndef FC_LIBTORCH_PROCESS_GROUP_H
#define FC_LIBTORCH_PROCESS_GROUP_H

#include "comm/beats.h"
#include "comm/rails.h"
#include "transport/collectives.h"

#include <c10/core/Device.h>

#include <string>

namespace fc {

// `group` is the name under which torch has registered it; of one rank there need be none.
fc_collectives_group group_collectives(c10::Device device, const std::string &group, int n_ranks,
                                       bool may_scale);
// Of the device's memory and streams; it outlives their use.
fc_collectives_host collectives_host(const c10::Device *device);

fc_rail_ops group_rails(const std::string &group, int n_ranks);
// How many messages of rails this process has sent and received over it: gloo numbers them among
// the group's collectives, of which ranks have called equally many.
size_t rail_messages(const std::string &group);

fc_beats_ops group_beats(const std::string &group);

} // namespace fc

#endif
