// A worker with a device, told what to do by lines of a FIFO; answers each with a line of JSON:
//   {"did":"take","code":"OK",…}, of what failed {"did":"take","code":"PEER_LOST","message":…}
//   connect
//   attach MODEL [shard=…] [bucket=BYTES] [device=…] [box=NAME:OFFSETS:EXTENTS]… [group=…]
//          [instance=…] [rank=N] [world=N] [generation=N]
//   take N|all           buckets, each copied out on a stream of its own
//   into                 rk_load_into
//   sums                 XXH3-128 of each tensor on the device
//   loaded               rk_loaded, rk_wait_commit
//   wait [MS]            rk_wait_update
//   update MODEL [group=…] [gather=MS]   rk_update
//   hog BYTES            takes all memory of the device but so much; 0: gives it back
//   detach
// device_client FIFO, with REKINDLE_STORE and REKINDLE_DEVICE ("cuda:0", "double:0") set;
// WORKER_SPEC is the contents of a shard spec.
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <sstream>
#include <string>
#include <vector>

#include <fmt/format.h>
#include <nlohmann/json.hpp>
#include <rekindle.h>
#include <xxhash.h>

#include "tests/gpu/client_device.h"
#include "tests/support/must.h"

namespace rekindle::testing {
namespace {

using Json = nlohmann::json;

constexpr std::int64_t kPatience = 60'000;
constexpr std::uint64_t kPiece = 64ull << 20;
constexpr std::byte kPoison{0xa5};

struct Failed {
  rk_error error;
};
void must(std::int32_t code, const rk_error& error) {
  if (code != RK_OK) throw Failed{error};
}
// "w", or of a box "w@[0,4]".
std::string key_of(const rk_tensor& tensor) {
  bool whole = true;
  std::string offsets;
  for (std::uint32_t i = 0; i < tensor.dimensions; ++i) {
    whole = whole && tensor.shape[i] == tensor.full_shape[i];
    offsets += fmt::format("{}{}", i > 0 ? "," : "", tensor.offset[i]);
  }
  return whole ? tensor.name : fmt::format("{}@[{}]", tensor.name, offsets);
}

std::vector<std::uint64_t> numbers(const std::string& text) {
  std::vector<std::uint64_t> all;
  std::istringstream in(text);
  for (std::string one; std::getline(in, one, ',');) all.push_back(std::stoull(one));
  return all;
}

std::uint32_t number(const std::string& text) {
  return static_cast<std::uint32_t>(std::stoul(text));
}

struct Box {
  std::string tensor;
  std::vector<std::uint64_t> offset, extent;
};
Box parse_box(const std::string& text) {
  const auto first = text.find(':');
  const auto second = text.find(':', first + 1);
  return {text.substr(0, first), numbers(text.substr(first + 1, second - first - 1)),
          numbers(text.substr(second + 1))};
}

struct Place {
  std::uint64_t at = 0;
  std::uint64_t bytes = 0;
  std::uint64_t taken = 0;
};

class Client {
 public:
  Client() : device_(ClientDevice::open(std::getenv("REKINDLE_DEVICE"))) {}
  ~Client() { detach(); }

  void connect() {
    detach();
    rk_disconnect(std::exchange(agent_, nullptr));
    rk_connect_options where{};
    where.size = sizeof where;
    where.store = std::getenv("REKINDLE_STORE");
    where.timeout_ms = kPatience;
    rk_error error;
    must(rk_connect(&where, &agent_, &error), error);
  }

  Json attach(std::istream& words) {
    detach();
    if (agent_ == nullptr) connect();
    rk_attach_options options{};
    options.size = sizeof options;
    std::string model, shard, group, instance, device = std::getenv("REKINDLE_DEVICE");
    words >> model;
    std::vector<Box> named;
    for (std::string word; words >> word;) {
      const auto value = word.substr(word.find('=') + 1);
      if (word.starts_with("shard=")) shard = value;
      if (word.starts_with("bucket=")) options.bucket_bytes = std::stoull(value);
      if (word.starts_with("device=")) device = value;
      if (word.starts_with("group=")) group = value;
      if (word.starts_with("instance=")) instance = value;
      if (word.starts_with("rank=")) options.rank = number(value);
      if (word.starts_with("world=")) options.world = number(value);
      if (word.starts_with("generation=")) options.generation = std::stoull(value);
      if (word.starts_with("box=")) named.push_back(parse_box(value));
    }
    std::vector<rk_box> boxes;
    for (const Box& box : named) {
      boxes.push_back({box.tensor.c_str(), static_cast<std::uint32_t>(box.offset.size()),
                       box.offset.data(), box.extent.data()});
    }
    options.model = model.c_str();
    options.shard = shard.empty() ? nullptr : shard.c_str();
    options.spec_json = std::getenv("WORKER_SPEC");
    options.boxes = boxes.empty() ? nullptr : boxes.data();
    options.box_count = boxes.size();
    options.timeout_ms = kPatience;
    options.device = device.c_str();
    options.stream = device_->native_stream();
    options.group = group.empty() ? nullptr : group.c_str();
    options.instance = instance.empty() ? nullptr : instance.c_str();
    rk_error error;
    must(rk_attach(agent_, &options, &session_, &error), error);
    return state();
  }

  Json take(std::istream& words) {
    std::string how_many;
    words >> how_many;
    const bool all = how_many == "all";
    const std::uint64_t wanted = all ? ~0ull : std::stoull(how_many);
    if (!memory_) make_room();
    Json answer;
    std::uint64_t buckets = 0, largest = 0;
    bool more = true;
    while (more && buckets < wanted) {
      const rk_part* parts = nullptr;
      std::size_t count = 0;
      rk_error error;
      must(rk_next_bucket(session_, kPatience, &parts, &count, &error), error);
      more = count > 0;
      if (!more) break;
      ++buckets;
      largest = std::max(largest, copy_out({parts, count}));
    }
    if (all) must(device_->stream().finish(soon()));
    answer = state();
    answer["buckets"] = buckets;
    answer["largest"] = largest;
    answer["more"] = more;
    return answer;
  }

  Json into() {
    make_room();
    const auto tensors = all_tensors();
    std::vector<rk_target> targets;
    for (const rk_tensor& tensor : tensors) {
      const Place& place = places_.at(key_of(tensor));
      targets.push_back(
          {tensor.name, tensor.offset, reinterpret_cast<void*>(place.at), tensor.bytes});
    }
    rk_error error;
    must(rk_load_into(session_, targets.data(), targets.size(), kPatience, &error), error);
    for (auto& [key, place] : places_) place.taken = place.bytes;
    return state();
  }

  Json sums() {
    must(device_->stream().finish(soon()));
    Json sums = Json::object();
    for (const auto& [key, place] : places_) {
      sums[key] = place.taken == place.bytes ? sum_of(place)
                                             : fmt::format("{} of {}", place.taken, place.bytes);
    }
    return {{"sums", sums}};
  }

  void loaded() {
    rk_error error;
    must(rk_loaded(session_, &error), error);
    must(rk_wait_commit(session_, kPatience, &error), error);
  }

  Json wait(std::istream& words) {
    std::int64_t patience = kPatience;
    words >> patience;
    std::uint64_t version = 0;
    rk_error error;
    must(rk_wait_update(session_, patience, &version, &error), error);
    return {{"version", version}};
  }

  Json update(std::istream& words) {
    if (agent_ == nullptr) connect();
    rk_update_options options{};
    options.size = sizeof options;
    std::string model, group;
    words >> model;
    for (std::string word; words >> word;) {
      const auto value = word.substr(word.find('=') + 1);
      if (word.starts_with("group=")) group = value;
      if (word.starts_with("gather=")) options.gather_ms = std::stoll(value);
    }
    options.model_version = model.c_str();
    options.group = group.empty() ? nullptr : group.c_str();
    options.timeout_ms = kPatience;
    rk_update_result result{};
    result.size = sizeof result;
    rk_error error;
    const std::int32_t code = rk_update(agent_, &options, &result, &error);
    if (code != RK_OK && code != RK_UNAVAILABLE) must(code, error);
    return {{"outcome", rk_code_name(code)},
            {"why", code == RK_OK ? "" : error.message},
            {"members", result.members},
            {"ready", result.ready},
            {"by_broadcast", result.by_broadcast}};
  }

  void hog(std::istream& words) {
    std::uint64_t left = 0;
    words >> left;
    hogged_.reset();
    if (left == 0) return;
    const auto free = must(device_->device().memory()).free_bytes;
    hogged_ = must(device_->device().allocate(free - left));
  }

  void detach() {
    rk_detach(std::exchange(session_, nullptr));
    memory_.reset();
    places_.clear();
  }

 private:
  static TimePoint soon() { return std::chrono::steady_clock::now() + std::chrono::minutes(2); }

  std::span<const rk_tensor> all_tensors() {
    const rk_tensor* tensors = nullptr;
    std::size_t count = 0;
    rk_error error;
    must(rk_tensors(session_, &tensors, &count, &error), error);
    return {tensors, count};
  }

  Json state() {
    rk_session_info info{};
    info.size = sizeof info;
    rk_error error;
    must(rk_info(session_, &info, &error), error);
    return {{"path", info.device_path}, {"version", info.version}, {"rung", info.rung},
            {"tensors", info.tensors},  {"done", info.bytes_done}, {"total", info.bytes_total}};
  }

  // Full of what no tensor has.
  void make_room() {
    std::uint64_t total = 0;
    for (const rk_tensor& tensor : all_tensors()) {
      places_[key_of(tensor)] = {total, tensor.bytes, 0};
      total += (tensor.bytes + 255) / 256 * 256;
    }
    memory_ = must(device_->device().allocate(std::max<std::uint64_t>(total, 1)));
    for (auto& [key, place] : places_) place.at += memory_->address();
    std::vector<std::byte> poison(std::min(total, kPiece), kPoison);
    for (std::uint64_t done = 0; done < total; done += kPiece) {
      const bucket::Upload piece{poison.data(), memory_->address() + done,
                                 std::min(kPiece, total - done)};
      must(device_->stream().upload({&piece, 1}));
    }
    must(device_->stream().finish(soon()));
  }

  // Returns the bytes that the bucket has.
  std::uint64_t copy_out(std::span<const rk_part> parts) {
    std::vector<bucket::Move> moves;
    std::uint64_t bytes = 0;
    for (const rk_part& part : parts) {
      Place& place = places_.at(key_of(*part.tensor));
      const auto from = reinterpret_cast<std::uintptr_t>(part.data);
      if (part.offset_bytes + part.bytes > place.bytes || (part.bytes > 0 && from % 256 != 0)) {
        throw std::runtime_error(fmt::format("a part of {} does not fit", part.tensor->name));
      }
      place.taken += part.bytes;
      bytes += part.bytes;
      if (part.bytes > 0) moves.push_back({from, place.at + part.offset_bytes, part.bytes});
    }
    must(device_->stream().move(moves));
    // A double's library has a stream of its own.
    if (device_->native_stream() == nullptr) must(device_->stream().finish(soon()));
    return bytes;
  }

  std::string sum_of(const Place& place) {
    const std::unique_ptr<XXH3_state_t, decltype(&XXH3_freeState)> state(XXH3_createState(),
                                                                         &XXH3_freeState);
    XXH3_128bits_reset(state.get());
    std::vector<std::byte> host(std::min(kPiece, place.bytes));
    for (std::uint64_t done = 0; done < place.bytes; done += kPiece) {
      const bucket::Download piece{place.at + done, host.data(),
                                   std::min(kPiece, place.bytes - done)};
      must(device_->stream().download({&piece, 1}));
      must(device_->stream().finish(soon()));
      XXH3_128bits_update(state.get(), host.data(), piece.bytes);
    }
    const auto sum = XXH3_128bits_digest(state.get());
    return fmt::format("{:016x}{:016x}", sum.high64, sum.low64);
  }

  const std::unique_ptr<ClientDevice> device_;
  rk_agent* agent_ = nullptr;
  rk_session* session_ = nullptr;
  std::unique_ptr<bucket::Memory> memory_, hogged_;
  std::map<std::string, Place> places_;
};

Json obey(Client& client, const std::string& word, std::istream& words) {
  if (word == "attach") return client.attach(words);
  if (word == "take") return client.take(words);
  if (word == "into") return client.into();
  if (word == "sums") return client.sums();
  if (word == "wait") return client.wait(words);
  if (word == "update") return client.update(words);
  if (word == "connect") client.connect();
  if (word == "loaded") client.loaded();
  if (word == "hog") client.hog(words);
  if (word == "detach") client.detach();
  return Json::object();
}

}  // namespace
}  // namespace rekindle::testing

int main(int, char** argv) {
  using namespace rekindle::testing;  // NOLINT(google-build-using-namespace)
  Client client;
  std::ifstream orders(argv[1]);
  for (std::string line; std::getline(orders, line);) {
    std::istringstream words(line);
    std::string word;
    words >> word;
    Json answer;
    try {
      answer = obey(client, word, words);
      answer["code"] = "OK";
    } catch (const Failed& failed) {
      answer = {{"code", rk_code_name(failed.error.code)}, {"message", failed.error.message}};
    } catch (const std::exception& failed) {
      answer = {{"code", "the test's worker"}, {"message", failed.what()}};
    }
    answer["did"] = word;
    std::printf("%s\n", answer.dump().c_str());
    std::fflush(stdout);
  }
  return 0;
}
