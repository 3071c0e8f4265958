/* SPDX-License-Identifier: Apache-2.0
 *
 * What a stream of the stand-in driver is given, with STANDIN_STREAMS=apart: it runs on a thread of the stream's own,
 * one after the other, while the call returns at once, as on a GPU. Places in a stream are counted: an event is one.
 */
#ifndef TUTTI_TESTS_CUDA_STREAMS_HPP
#define TUTTI_TESTS_CUDA_STREAMS_HPP

#include <condition_variable>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>
#include <utility>
#include <vector>

namespace standin {

static inline bool streams_are_apart() {
    static const bool apart = [] {
        const char *streams = getenv("STANDIN_STREAMS");
        return streams != nullptr && strcmp(streams, "apart") == 0;
    }();
    return apart;
}

class line : public std::enable_shared_from_this<line> {
  public:
    /* Its place is the number that is returned. */
    uint64_t give(std::function<void()> what) {
        std::lock_guard<std::mutex> held(lock_);
        waiting_.push_back(std::move(what));
        if (!runs_) {
            runs_ = true;
            std::thread([self = shared_from_this()] { self->run(); }).detach();
        }
        changed_.notify_all();
        return ++given_;
    }
    uint64_t end() { /* the place of what was given last */
        std::lock_guard<std::mutex> held(lock_);
        return given_;
    }
    bool has_passed(uint64_t place) {
        std::lock_guard<std::mutex> held(lock_);
        return done_ >= place;
    }
    void wait(uint64_t place) {
        std::unique_lock<std::mutex> held(lock_);
        changed_.wait(held, [&] { return done_ >= place; });
    }
    void close() { /* what it was given still runs */
        std::lock_guard<std::mutex> held(lock_);
        closed_ = true;
        changed_.notify_all();
    }

  private:
    void run() {
        std::unique_lock<std::mutex> held(lock_);
        for (;;) {
            changed_.wait(held, [&] { return closed_ || !waiting_.empty(); });
            if (waiting_.empty())
                return;
            auto what = std::move(waiting_.front());
            waiting_.pop_front();
            held.unlock();
            what();
            what = nullptr; /* what it holds goes before it counts as done */
            held.lock();
            done_++;
            changed_.notify_all();
        }
    }

    std::mutex lock_;
    std::condition_variable changed_;
    std::deque<std::function<void()>> waiting_;
    uint64_t given_ = 0, done_ = 0;
    bool runs_ = false, closed_ = false;
};

/* Of all streams, those that were closed too while they run. */
class lines {
  public:
    std::shared_ptr<line> make() {
        auto made = std::make_shared<line>();
        std::lock_guard<std::mutex> held(lock_);
        size_t left = 0;
        for (auto &each : all_)
            if (!each.expired())
                all_[left++] = each;
        all_.resize(left);
        all_.push_back(made);
        return made;
    }
    void wait() { /* for what they were given until now */
        std::vector<std::pair<std::shared_ptr<line>, uint64_t>> now;
        {
            std::lock_guard<std::mutex> held(lock_);
            for (auto &each : all_)
                if (auto one = each.lock())
                    now.emplace_back(one, one->end());
        }
        for (auto &each : now)
            each.first->wait(each.second);
    }

  private:
    std::mutex lock_;
    std::vector<std::weak_ptr<line>> all_;
};

} // namespace standin

#endif
