#include "tests/client/device_producer.h"

#include <stdexcept>

#include <sys/socket.h>

#include "src/bucket/bucket_messages.h"
#include "src/bucket/double_device.h"
#include "src/bucket/pipeline.h"
#include "src/bucket/segment_fetch.h"
#include "src/ipc/channel.h"

namespace rekindle::client::testing {

namespace {

TimePoint soon() { return SteadyClock().now() + std::chrono::seconds(20); }

bucket::Contents contents_of(const proto::Attached& attached) {
  std::vector<bucket::NamedBox> wanted;
  for (const proto::WantedBox& box : attached.wanted()) {
    wanted.push_back({box.tensor(),
                      {box.offset().begin(), box.offset().end()},
                      {box.extent().begin(), box.extent().end()}});
  }
  const std::vector<std::uint64_t> bytes(attached.segment_bytes().begin(),
                                         attached.segment_bytes().end());
  auto contents = bucket::Contents::create(attached.tensor_set(), attached.layout(), wanted, bytes);
  if (!contents) throw std::runtime_error(contents.error().message());
  return std::move(*contents);
}

// The pipeline's last stage: the socket.
class ByChannel final : public bucket::Deliver {
 public:
  ByChannel(bucket::Device& device, const bucket::Plan& plan, ipc::Channel channel,
            const ProducerScript& script, std::atomic<std::size_t>& filled)
      : device_(device),
        plan_(plan),
        channel_(std::move(channel)),
        script_(script),
        filled_(filled) {}

  Result<void> send(bucket::Message message) {
    bucket::Encoded frame = bucket::encode(std::move(message));
    return channel_.send(std::move(frame.body), std::move(frame.descriptors), soon());
  }

  Result<void> greet(bucket::Slots& slots) {
    bucket::BuffersMessage buffers{.bucket_bytes = slots.bucket_bytes,
                                   .memory_bytes = slots.memory->bytes(),
                                   .memory = {},
                                   .filled = {},
                                   .warning = {}};
    TRY(buffers.memory, device_.share(*slots.memory));
    for (const auto& event : slots.filled) {
      TRY(bucket::Handle handle, device_.share(*event));
      buffers.filled.push_back(std::move(handle));
    }
    if (script_.spoils_handles) buffers.memory.bytes = "of another device";
    TRY_VOID(send(std::move(buffers)));
    TRY(ipc::Frame frame, channel_.receive(soon()));
    TRY(auto answer, bucket::decode(frame.body, std::move(frame.descriptors)));
    if (const auto* const failed = std::get_if<bucket::FailedMessage>(&answer)) {
      return fail(failed->error);
    }
    for (const bucket::Handle& handle : std::get<bucket::OpenedMessage>(answer).released) {
      TRY(auto event, device_.open_event(handle));
      events_.push_back(std::move(event));
    }
    said_.resize(events_.size());
    return {};
  }

  Result<void> hand_over(std::size_t bucket, std::uint32_t slot) override {
    const auto parts = plan_.parts(bucket);
    // Counted before the worker hears of it.
    const std::size_t before = filled_.fetch_add(1);
    bucket::FilledMessage filled{slot, before, {parts.begin(), parts.end()}};
    if (script_.spoils_parts && filled.sequence == 1) filled.parts[0].offset_bytes = 1ull << 60;
    said_[slot] = false;
    TRY_VOID(send(std::move(filled)));
    if (before + 1 == script_.dies_after) {
      return fail(ErrorCode::kPeerLost, "the producer dies");
    }
    return {};
  }

  Result<bool> released(std::uint32_t slot) override {
    if (!said_[slot]) return false;
    return device_.is_done(*events_[slot]);
  }

  // Reads the worker's messages for a moment.
  Result<void> listen() {
    auto frame = channel_.receive(SteadyClock().now() + std::chrono::milliseconds(1));
    if (!frame && frame.error().code() == ErrorCode::kTimeout) return {};
    if (!frame) return fail(std::move(frame).error());
    TRY(const auto message, bucket::decode(frame->body, std::move(frame->descriptors)));
    if (const auto* const failed = std::get_if<bucket::FailedMessage>(&message)) {
      return fail(failed->error);
    }
    said_.at(std::get<bucket::ReleasedMessage>(message).slot) = true;
    return {};
  }

 private:
  bucket::Device& device_;
  const bucket::Plan& plan_;
  ipc::Channel channel_;
  const ProducerScript& script_;
  std::atomic<std::size_t>& filled_;
  std::vector<std::unique_ptr<bucket::Event>> events_;
  std::vector<bool> said_;
};

Result<void> produce(const FakeModel& model, const proto::Attached& attached, UniqueFd socket,
                     const ProducerScript& script, std::atomic<std::size_t>& filled) {
  const auto device = bucket::make_double_device("double:0", 1ull << 30);
  const bucket::Contents contents = contents_of(attached);
  TRY(auto slots,
      bucket::allocate_slots(*device, {script.bucket_bytes, script.slots}, contents.total_bytes()));
  TRY(const bucket::Plan plan, bucket::Plan::create(contents, slots.bucket_bytes));
  TRY(ipc::Channel channel, ipc::Channel::adopt(std::move(socket), 1024));
  ByChannel deliver(*device, plan, std::move(channel), script, filled);
  if (script.refuses) return deliver.send(bucket::FailedMessage{*script.refuses});
  TRY_VOID(deliver.greet(slots));

  bucket::Pinner pinner(*device, 1);
  bucket::SegmentFetch::Segments segments;
  const std::vector<UniqueFd> files = model.segments();
  for (std::size_t i = 0; i < files.size(); ++i) {
    TRY(auto segment, pinner.add(files[i].get(), attached.segment_bytes(static_cast<int>(i))));
    segments.push_back(std::move(segment));
  }
  bucket::SegmentFetch fetch(plan, pinner, std::move(segments), contents.tiles().tile_count());
  fetch.mark_all_ready();
  bucket::Pipeline pipeline(*device, plan, slots, fetch, nullptr, deliver);
  TRY_VOID(pipeline.start());
  while (true) {
    TRY(const auto state, pipeline.step(SteadyClock().now()));
    if (state == bucket::Pipeline::State::kDone) return deliver.send(bucket::FinishedMessage{});
    TRY_VOID(deliver.listen());
  }
}

}  // namespace

DeviceProducer::DeviceProducer(const FakeModel& model, const proto::AgentFrame& attached,
                               ProducerScript script)
    : model_(model), script_(std::move(script)) {
  int ends[2];
  if (::socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends) != 0) {
    throw std::runtime_error("socketpair");
  }
  worker_end_ = UniqueFd(ends[0]);
  own_end_ = UniqueFd(ends[1]);
  thread_ = std::thread([this, attached] { run(attached); });
}

void DeviceProducer::run(proto::AgentFrame attached) {
  auto ended = produce(model_, attached.attached(), std::move(own_end_), script_, filled_);
  if (!ended) outcome_ = std::move(ended).error();
}

std::optional<Error> DeviceProducer::outcome() {
  if (thread_.joinable()) thread_.join();
  return outcome_;
}

DeviceProducer::~DeviceProducer() {
  worker_end_.reset();
  outcome();
}

}  // namespace rekindle::client::testing
