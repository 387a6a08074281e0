#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "transport/registry.h"
#include "transport/tcp/data_tls.h"
#include "transport/tcp/tcp_wire.h"

namespace rekindle::transport::tcp {

// Sends one response at a time straight from the segment. It holds the region until the last byte
// is in the socket. One server thread uses it.
//
// sendfile takes a fifth less CPU time than sendmsg from the mapping. But where the kernel paces
// the connection with a timer, each part of 64 KiB waits for the timer, and sendfile moves a third
// less.
//
// The file may be truncated meanwhile. Before the header is out, the answer is kFault. After it,
// the promised bytes do not exist, and the stream can only be broken.
class Sender {
 public:
  // How contiguous ranges of a file are sent; short runs always come from the mapping.
  enum class From { kFile, kMapping };
  explicit Sender(From from) : from_(from) {}
  // From here on the stream has TLS. `tls` outlives the sender.
  void use_tls(DataTls& tls);

  enum class Outcome { kDone, kBlocked, kBudget, kBroken };
  struct Sent {
    Outcome outcome = Outcome::kDone;
    std::uint64_t payload = 0;  // bytes that this call put into the socket
  };

  // Answers `request` from `region`, or with an error.
  void start(const Request& request, std::shared_ptr<const Region> region);
  void start_error(std::uint64_t wr_id, OpStatus status);
  bool active() const { return active_; }
  std::uint64_t payload_left() const { return payload_left_; }

  // Sends until the socket is full, `budget` payload bytes are out, or everything is sent. `more`:
  // another response follows at once.
  Sent send(int socket, std::uint64_t budget, bool more);
  // Why the last send() was kBroken.
  const std::string& broken_reason() const { return broken_reason_; }

 private:
  Sent step(int socket, std::uint64_t budget, bool more);
  Sent send_header(int socket);
  Sent send_file(int socket, std::uint64_t budget);
  Sent send_gathered(int socket, std::uint64_t budget, bool more);
  // Where the kernel does not encrypt. At most one record waits for the socket.
  Sent send_sealed(std::uint64_t budget);
  // Copies the next bytes of the answer. nullopt: they do not exist any more.
  std::optional<std::uint64_t> copy_payload(std::span<std::byte> into) const;
  bool copy_run(std::uint64_t offset, std::span<std::byte> into) const;
  bool all_out() const;
  Sent broken(std::string why);
  Sent failed(int error_number, const char* call);
  void advance(std::uint64_t payload);
  bool by_file() const;

  const From from_;
  std::array<std::byte, kResponseBytes> header_{};
  std::size_t header_sent_ = 0;
  StridedRange range_;
  std::shared_ptr<const Region> region_;
  std::uint64_t run_ = 0;       // next run
  std::uint64_t run_sent_ = 0;  // bytes of it that are out
  std::uint64_t payload_left_ = 0;
  bool active_ = false;
  std::string broken_reason_;
  DataTls* tls_ = nullptr;  // null: nothing is to be encrypted here
  std::vector<std::byte> record_;
  std::size_t record_begin_ = 0;
  std::size_t record_end_ = 0;
};

}  // namespace rekindle::transport::tcp
