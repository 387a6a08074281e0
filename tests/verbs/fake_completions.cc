#include <algorithm>
#include <cerrno>
#include <system_error>

#include <poll.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include "tests/verbs/fake_state.h"
#include "tests/verbs/fake_verbs.h"

// Completion channels and queues.
namespace rekindle::transport::verbs {

EventDescriptor::EventDescriptor() : fd(::eventfd(0, EFD_SEMAPHORE | EFD_CLOEXEC)) {
  if (!fd) throw std::system_error(errno, std::generic_category(), "eventfd");
}

void EventDescriptor::add() const {
  if (::eventfd_write(fd.get(), 1) != 0) {
    throw std::system_error(errno, std::generic_category(), "eventfd");
  }
}

bool EventDescriptor::take() const {
  eventfd_t one = 0;
  return ::eventfd_read(fd.get(), &one) == 0;
}

void EventDescriptor::take_back() const {
  pollfd ready{fd.get(), POLLIN, 0};
  if (::poll(&ready, 1, 0) == 1) take();
}

ibv_comp_channel* FakeVerbs::create_comp_channel(ibv_context* handle) {
  Lock lock(state_.mutex);
  auto* const context = static_cast<ContextObject*>(handle);
  const int error = begin_call(state_, lock, *context->owner, FakeCall::kCreateCompChannel);
  if (error != 0) {
    errno = error;
    return nullptr;
  }
  auto channel = std::make_unique<ChannelObject>();
  channel->context = handle;
  channel->fd = channel->ready.fd.get();
  ++context->children;
  ChannelObject* const result = channel.get();
  state_.channels.emplace(result, std::move(channel));
  return result;
}

int FakeVerbs::destroy_comp_channel(ibv_comp_channel* handle) {
  const Lock lock(state_.mutex);
  ChannelObject* const channel = state_.find(state_.channels, handle, "destroy_comp_channel");
  if (channel == nullptr) return EINVAL;
  if (channel->users > 0) return EBUSY;
  --static_cast<ContextObject*>(channel->context)->children;
  state_.channels.erase(handle);
  return 0;
}

ibv_cq* FakeVerbs::create_cq(ibv_context* handle, int entries, void* cq_context,
                             ibv_comp_channel* channel, int comp_vector) {
  Lock lock(state_.mutex);
  auto* const context = static_cast<ContextObject*>(handle);
  DeviceObject& device = *context->owner;
  int error = begin_call(state_, lock, device, FakeCall::kCreateCq);
  if (error == 0 && (entries < 1 || entries > device.spec.attr.max_cqe || comp_vector != 0)) {
    error = EINVAL;
  }
  const auto used = std::count_if(state_.cqs.begin(), state_.cqs.end(), [&](const auto& cq) {
    return static_cast<ContextObject*>(cq.second->context)->owner == &device;
  });
  if (error == 0 && used >= device.spec.attr.max_cq) error = ENOMEM;
  if (error != 0) {
    errno = error;
    return nullptr;
  }
  auto cq = std::make_unique<CqObject>();
  cq->context = handle;
  cq->channel = channel;
  cq->cq_context = cq_context;
  cq->cqe = entries;
  ++context->children;
  if (channel != nullptr) ++static_cast<ChannelObject*>(channel)->users;
  CqObject* const result = cq.get();
  state_.cqs.emplace(result, std::move(cq));
  return result;
}

int FakeVerbs::destroy_cq(ibv_cq* handle) {
  Lock lock(state_.mutex);
  CqObject* cq = state_.find(state_.cqs, handle, "destroy_cq");
  if (cq == nullptr) return EINVAL;
  auto& context = *static_cast<ContextObject*>(cq->context);
  const int error = begin_call(state_, lock, *context.owner, FakeCall::kDestroyCq);
  if (error != 0 && !context.owner->removed) return error;
  if (cq->users > 0) return EBUSY;
  if (!wait_acked(state_, lock, cq->unacked)) {
    state_.problem("destroy_cq on {}: {} events are not acknowledged; a real one waits for ever",
                   context.owner->key, cq->unacked);
  }
  drop_events(context, cq);
  if (auto* const channel = static_cast<ChannelObject*>(cq->channel)) {
    std::erase_if(channel->events, [&](const ibv_cq* event) {
      if (event == cq) channel->ready.take_back();
      return event == cq;
    });
    --channel->users;
  }
  --context.children;
  state_.cqs.erase(handle);
  return 0;
}

int FakeVerbs::req_notify_cq(ibv_cq* handle, int solicited_only) {
  Lock lock(state_.mutex);
  CqObject* const cq = state_.find(state_.cqs, handle, "req_notify_cq");
  if (cq == nullptr) return EINVAL;
  const int error = begin_call(state_, lock, *static_cast<ContextObject*>(cq->context)->owner,
                               FakeCall::kReqNotifyCq);
  if (error != 0) return error;
  // Asking for every completion outweighs asking for solicited ones.
  if (solicited_only == 0) cq->armed = true;
  if (solicited_only != 0) cq->armed_solicited = true;
  return 0;
}

int FakeVerbs::get_cq_event(ibv_comp_channel* handle, ibv_cq** cq, void** cq_context) {
  auto* const channel = static_cast<ChannelObject*>(handle);
  {
    Lock lock(state_.mutex);
    DeviceObject& device = *static_cast<ContextObject*>(channel->context)->owner;
    const int error = begin_call(state_, lock, device, FakeCall::kGetCqEvent);
    if (error != 0 && !device.removed) {
      errno = error;
      return -1;
    }
  }
  if (!channel->ready.take()) return -1;  // blocks where the caller left it blocking
  const Lock lock(state_.mutex);
  if (channel->events.empty()) {
    errno = EAGAIN;
    return -1;
  }
  *cq = channel->events.front();
  *cq_context = (*cq)->cq_context;
  channel->events.pop_front();
  ++static_cast<CqObject*>(*cq)->unacked;
  return 0;
}

void FakeVerbs::ack_cq_events(ibv_cq* handle, unsigned count) {
  const Lock lock(state_.mutex);
  CqObject* const cq = state_.find(state_.cqs, handle, "ack_cq_events");
  if (cq == nullptr) return;
  if (cq->unacked < count) state_.problem("ack_cq_events: acknowledged more often than got");
  cq->unacked -= std::min<std::uint64_t>(cq->unacked, count);
  state_.changed.notify_all();
}

int FakeVerbs::poll_cq(ibv_cq* handle, int count, ibv_wc* completions) {
  Lock lock(state_.mutex);
  CqObject* const cq = state_.find(state_.cqs, handle, "poll_cq");
  if (cq == nullptr) return -1;
  DeviceObject& device = *static_cast<ContextObject*>(cq->context)->owner;
  const int error = begin_call(state_, lock, device, FakeCall::kPollCq);
  if (error != 0 && !device.removed) return -1;
  int polled = 0;
  while (polled < count && !cq->entries.empty()) {
    const Completion& next = cq->entries.front();
    completions[polled++] = next.wc;
    if (next.receive) {
      ++next.qp->receives_freed;
    } else {
      next.qp->freed = std::max(next.qp->freed, next.frees_up_to);
    }
    cq->entries.pop_front();
  }
  return polled;
}

// A completion that finds the queue full is lost, the queue is broken, and so is all that uses it.
void push_completion(FakeState& state, CqObject& cq, Completion completion, bool solicited) {
  if (cq.overrun) return;
  auto& context = *static_cast<ContextObject*>(cq.context);
  if (cq.entries.size() >= static_cast<std::size_t>(cq.cqe)) {
    cq.overrun = true;
    ibv_async_event event{};
    event.event_type = IBV_EVENT_CQ_ERR;
    event.element.cq = &cq;
    push_event(context, event);
    for (const auto& [handle, qp] : state.qps) {
      if (qp->send_cq == &cq || qp->recv_cq == &cq) fail_queue_pair(state, *qp);
    }
    return;
  }
  const bool error = completion.wc.status != IBV_WC_SUCCESS;
  cq.entries.push_back(std::move(completion));
  if (!cq.armed && !(cq.armed_solicited && (solicited || error))) return;
  cq.armed = cq.armed_solicited = false;
  if (auto* const channel = static_cast<ChannelObject*>(cq.channel)) {
    channel->events.push_back(&cq);
    channel->ready.add();
  }
}

}  // namespace rekindle::transport::verbs
