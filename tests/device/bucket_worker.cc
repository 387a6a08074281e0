#include "tests/device/bucket_worker.h"

#include <stdexcept>
#include <utility>

#include "proto/worker.pb.h"
#include "src/bucket/double_device.h"
#include "tests/support/must.h"

namespace rekindle::device::testing {

namespace {

TimePoint soon() { return SteadyClock().now() + std::chrono::seconds(20); }

}  // namespace

std::string attached_frame(const bucket::testing::Sample& sample,
                           const std::vector<bucket::NamedBox>& wanted) {
  proto::AgentFrame frame;
  auto& attached = *frame.mutable_attached();
  attached.set_tensor_set(sample.tensors.serialize());
  attached.set_layout(sample.layout.serialize());
  attached.mutable_id()->set_model("m");
  attached.mutable_id()->set_version(41);
  for (const auto bytes : sample.segment_bytes) attached.add_segment_bytes(bytes);
  for (const auto& box : wanted) {
    auto& one = *attached.add_wanted();
    one.set_tensor(box.tensor);
    for (const auto offset : box.offset) one.add_offset(offset);
    for (const auto extent : box.extent) one.add_extent(extent);
  }
  return frame.SerializeAsString();
}

BucketWorker::BucketWorker(UniqueFd socket)
    : channel_(must(ipc::Channel::adopt(std::move(socket), 64))),
      device_(bucket::make_double_device("double:0", 1)),
      stream_(must(device_->make_stream())) {}

std::optional<bucket::Message> BucketWorker::receive() {
  auto frame = channel_->receive(soon());
  if (!frame) {
    if (frame.error().code() == ErrorCode::kPeerLost) return std::nullopt;
    throw std::runtime_error(frame.error().message());
  }
  return must(bucket::decode(frame->body, std::move(frame->descriptors)));
}

void BucketWorker::say(bucket::Message message) {
  auto encoded = bucket::encode(std::move(message));
  must(channel_->send(std::move(encoded.body), std::move(encoded.descriptors), soon()));
}

void BucketWorker::open() {
  auto message = receive();
  if (message && std::holds_alternative<bucket::FailedMessage>(*message)) {
    failed_ = std::get<bucket::FailedMessage>(*message).error;
    return;
  }
  if (!message) throw std::runtime_error("the producer has gone");
  buffers_ = std::move(std::get<bucket::BuffersMessage>(*message));
  memory_ = must(device_->open_memory(buffers_.memory, buffers_.memory_bytes));
  bucket::OpenedMessage opened;
  for (const auto& handle : buffers_.filled) {
    filled_.push_back(must(device_->open_event(handle)));
    released_.push_back(must(device_->make_event()));
    opened.released.push_back(must(device_->share(*released_.back())));
  }
  say(std::move(opened));
}

std::optional<bucket::FilledMessage> BucketWorker::next() {
  auto message = receive();
  if (!message) return std::nullopt;
  if (auto* const filled = std::get_if<bucket::FilledMessage>(&*message)) return *filled;
  if (std::holds_alternative<bucket::FinishedMessage>(*message)) finished_ = true;
  if (auto* const failed = std::get_if<bucket::FailedMessage>(&*message)) failed_ = failed->error;
  return std::nullopt;
}

void BucketWorker::read(const bucket::FilledMessage& filled) {
  must(stream_->wait(*filled_[filled.slot]));
  std::vector<bucket::Download> copies;
  for (const auto& part : filled.parts) {
    auto& piece = pieces_[part.piece];
    piece.resize(std::max<std::size_t>(piece.size(), part.offset_bytes + part.bytes));
  }
  for (const auto& part : filled.parts) {
    if (part.bytes == 0) continue;
    copies.push_back({memory_->address() + filled.slot * buffers_.bucket_bytes + part.at,
                      reinterpret_cast<std::byte*>(pieces_[part.piece].data()) + part.offset_bytes,
                      part.bytes});
  }
  if (!copies.empty()) must(stream_->download(copies));
  must(stream_->record(*released_[filled.slot]));
  must(stream_->finish(soon()));
  ++buckets_;
}

void BucketWorker::release(const bucket::FilledMessage& filled) {
  say(bucket::ReleasedMessage{filled.slot, filled.sequence});
}

void BucketWorker::take_all() {
  while (const auto filled = next()) {
    read(*filled);
    release(*filled);
  }
}

void BucketWorker::close() {
  memory_.reset();
  channel_.reset();
}

std::string BucketWorker::compare(const bucket::testing::Sample& sample,
                                  const std::vector<bucket::NamedBox>& wanted) const {
  const auto contents = sample.contents(wanted);
  std::string wrong;
  for (std::size_t i = 0; i < contents.pieces().size(); ++i) {
    const auto& piece = contents.pieces()[i];
    const auto found = pieces_.find(static_cast<std::uint32_t>(i));
    if (found == pieces_.end()) {
      wrong += fmt::format("{} is missing; ", piece.name());
    } else if (found->second != sample.bytes_of(contents, piece)) {
      wrong += fmt::format("{} differs; ", piece.name());
    }
  }
  return wrong;
}

}  // namespace rekindle::device::testing
