// What torch asks of a device: its streams, its events, and host memory that it can copy from.
#ifndef FAKE_GUARD_H
#define FAKE_GUARD_H

#include "memory.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <c10/core/StorageImpl.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

namespace fake {

// Streams by number: 0 is the default one, then those of the pool in the order in which they were
// asked for, so that the core's are 1 to 4; further on users', and process groups' own.
constexpr int first_pooled = 1, first_new = 50, first_of_groups = 100;
inline int next_pooled = first_pooled, next_new = first_new, next_of_groups = first_of_groups;

struct Event {
    Mark mark;
    int n_queries = 0;
};

struct Guard final : c10::impl::DeviceGuardImplInterface {
    c10::DeviceType type() const override { return the_device.type(); }
    c10::Device exchangeDevice(c10::Device) const override { return the_device; }
    c10::Device getDevice() const override { return the_device; }
    void setDevice(c10::Device) const override {}
    void uncheckedSetDevice(c10::Device) const noexcept override {}
    c10::DeviceIndex deviceCount() const noexcept override { return 1; }

    static c10::Stream numbered(int stream)
    {
        return c10::Stream(c10::Stream::UNSAFE, the_device, stream);
    }
    static int number(const c10::Stream &stream) { return static_cast<int>(stream.id()); }
    static Event *event_of(void *event) { return static_cast<Event *>(event); }

    c10::Stream getStream(c10::Device) const override { return numbered(current_stream); }
    c10::Stream getDefaultStream(c10::Device) const override { return numbered(0); }
    c10::Stream getStreamFromGlobalPool(c10::Device, bool) const override
    {
        return numbered(next_pooled++);
    }
    c10::Stream getNewStream(c10::Device, int) const override { return numbered(next_new++); }
    c10::Stream exchangeStream(c10::Stream stream) const override
    {
        return numbered(std::exchange(current_stream, number(stream)));
    }
    void *getStreamNativeHandle(const c10::Stream) const override { return nullptr; }

    void record(void **event, const c10::Stream &stream, const c10::DeviceIndex,
                const c10::EventFlag) const override
    {
        if (*event == nullptr) {
            *event = new Event();
        }
        if (streams.heeds(RECORD, number(stream), number(stream))) {
            *event_of(*event) = {streams.mark(number(stream))};
        }
    }

    void block(void *event, const c10::Stream &stream) const override
    {
        const Mark mark = event_of(event)->mark;
        if (mark.stream >= 0 && streams.heeds(WAIT, number(stream), mark.stream)) {
            streams.wait(number(stream), mark);
        }
    }

    // Who asks twice has waited.
    bool queryEvent(void *event) const override
    {
        Event *asked = event_of(event);
        if (asked == nullptr || asked->mark.stream < 0) {
            return true;
        }
        if (asked->n_queries++ > 0) {
            streams.reach(asked->mark);
        }
        return streams.is_reached(asked->mark);
    }

    void synchronizeEvent(void *event) const override
    {
        const Event *asked = event_of(event);
        if (asked != nullptr && streams.heeds(HOST_WAIT, -1, asked->mark.stream)) {
            streams.reach(asked->mark);
        }
    }

    void destroyEvent(void *event, const c10::DeviceIndex) const noexcept override
    {
        delete event_of(event);
    }

    bool queryStream(const c10::Stream &stream) const override
    {
        return streams.is_reached(streams.mark(number(stream)));
    }
    void synchronizeStream(const c10::Stream &stream) const override
    {
        streams.reach(streams.mark(number(stream)));
    }
    void synchronizeDevice(const c10::DeviceIndex) const override { streams.synchronize(); }

    void recordDataPtrOnStream(const c10::DataPtr &data, const c10::Stream &stream) const override
    {
        if (streams.heeds(RECORD_STREAM, number(stream), memory.home_of(data.get()))) {
            memory.record(data.get(), number(stream));
        }
    }
};

C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);

// Pinned memory, never given back: a copy may be on its way.
struct Pinned final : c10::Allocator {
    c10::DataPtr allocate(size_t bytes) override
    {
        void *memory = bytes > 0 ? std::aligned_alloc(512, (bytes + 511) / 512 * 512) : nullptr;
        const Locked locked(lock);
        blocks[memory] = bytes;
        return {memory, memory, &give_back, c10::Device(c10::kCPU)};
    }
    c10::DeleterFnPtr raw_deleter() const override { return &give_back; }
    void copy_data(void *to, const void *from, size_t bytes) const override
    {
        default_copy_data(to, from, bytes);
    }
    static void give_back(void *) {}

    bool has(const void *memory)
    {
        const Locked locked(lock);
        auto block = blocks.upper_bound(memory);
        return block != blocks.begin() &&
               static_cast<const char *>(memory) <
                   static_cast<const char *>((--block)->first) + block->second;
    }

    std::map<const void *, size_t> blocks;
};

inline Pinned pinned;

struct Hooks final : at::PrivateUse1HooksInterface {
    bool isBuilt() const override { return true; }
    bool isAvailable() const override { return true; }
    bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
    c10::DeviceIndex deviceCount() const override { return 1; }
    c10::DeviceIndex getCurrentDevice() const override { return 0; }
    c10::DeviceIndex exchangeDevice(c10::DeviceIndex) const override { return 0; }
    c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex) const override { return 0; }
    void setCurrentDevice(c10::DeviceIndex) const override {}
    bool isPinnedPtr(const void *data) const override { return pinned.has(data); }
    c10::Allocator *getPinnedMemoryAllocator() const override { return &pinned; }
    const at::Generator &getDefaultGenerator(c10::DeviceIndex) const override
    {
        return at::detail::getDefaultCPUGenerator();
    }
    void resizePrivateUse1Bytes(const c10::Storage &storage, size_t bytes) const override
    {
        c10::DataPtr fresh = memory.allocate(bytes);
        const size_t kept = std::min(bytes, storage.nbytes());
        streams.run(current_stream, [to = fresh.get(), from = storage.data(), kept] {
            std::memcpy(to, from, kept);
        });
        storage.unsafeGetStorageImpl()->set_data_ptr_noswap(std::move(fresh));
        storage.unsafeGetStorageImpl()->set_nbytes(bytes);
    }
};

} // namespace fake

#endif
