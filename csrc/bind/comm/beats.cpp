/* `_C.Beats`: signs of life (comm/beats.h) in the store of a process group. */
#include "comm/beats.h"
#include "base/clock.h"
#include "bind/module.h"
#include "bind/python/objects.h"

#include <torch/csrc/distributed/c10d/GroupRegistry.hpp>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

namespace fc {

namespace {

using Store = c10::intrusive_ptr<c10d::Store>;

template <typename Body> fc_status answered(Body &&body)
{
    try {
        body();
        return FC_OK;
    } catch (const std::exception &error) {
        return fc_fail(FC_ERR_GROUP, "the store: %s", error.what());
    }
}

fc_status set(void *context, int rank, const char *words)
{
    return answered([&] {
        (*static_cast<Store *>(context))
            ->set(std::to_string(rank), std::vector<uint8_t>(words, words + std::strlen(words)));
    });
}

fc_status get(void *context, int rank, char *words)
{
    return answered([&] {
        c10d::Store &store = **static_cast<Store *>(context);
        const std::string key = std::to_string(rank);
        if (store.check({key})) {
            const std::vector<uint8_t> found = store.get(key);
            const size_t n = std::min(found.size(), size_t(FC_BEATS_WORDS - 1));
            std::copy_n(found.begin(), n, words);
            words[n] = '\0';
        }
    });
}

struct Beats {
    explicit Beats(Fields &given)
    {
        const auto group = c10d::resolve_process_group(given.text("group"));
        const int rank = given.integer("rank");
        given.end();
        auto *store = new Store(
            c10::make_intrusive<c10d::PrefixStore>("fsdp_c/beats", group->getStore()->clone()));
        const fc_beats_ops ops = {store, set, get,
                                  [](void *context) { delete static_cast<Store *>(context); }};
        check(fc_beats_start(&ops, rank, 0, &core));
    }
    ~Beats()
    {
        const NoGil no_gil;
        fc_beats_stop(core);
    }

    fc_beats *core = nullptr;
};

double seconds_since(int64_t ns)
{
    return (double)(fc_now_ns() - ns) / (double)FC_NS_PER_S;
}

Ref beats_heard(Beats &self, PyObject *rank)
{
    const fc_beat found = fc_beats_heard(self.core, integer_from(rank));
    const char *words = std::strchr(found.words, ' '); // behind their number
    return found.at_ns == 0 ? Ref::borrow(Py_None)
                            : checked(Py_BuildValue("(sd)", words != nullptr ? words + 1 : "",
                                                    seconds_since(found.at_ns)));
}

PyMethodDef beats_methods[] = {
    method<[](Beats &self, PyObject *words) { fc_beats_say(self.core, text_from(words)); }>("say"),
    method<[](Beats &self, Fields &given) {
        const auto ranks = given.values<integer_from>("ranks");
        given.end();
        return fc_beats_want(self.core, ranks.data(), ranks.size());
    }>("want"),
    method<beats_heard>("heard"),
    method<[](Beats &self) { return seconds_since(fc_beats_answered_ns(self.core)); }>("answered"),
    {},
};

} // namespace

int register_beats(PyObject *module)
{
    return add_type<Beats>(module, {.name = "fsdp_c._C.Beats", .methods = beats_methods});
}

} // namespace fc
