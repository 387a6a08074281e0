#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include <sys/uio.h>

#include "src/base/unique_fd.h"
#include "transport/path.h"
#include "transport/tcp/data_tls.h"
#include "transport/tcp/tcp_wire.h"

namespace rekindle::transport::tcp {

// The reading end of one stream. Requests are pipelined. Answers come in order and are received
// straight into their destinations. Only poll() writes to these.
class TcpPath final : public Path {
 public:
  // `socket` is connected, non-blocking and past its hello. `tls` is null for a plain stream.
  TcpPath(UniqueFd socket, std::unique_ptr<DataTls> tls);
  ~TcpPath() override;

  Result<std::size_t> post(std::span<const ReadOp> ops) override;
  std::size_t poll(std::span<Completion> out) override;
  void abort() override;
  std::size_t in_flight() const override { return count_; }
  std::uint64_t bytes_landed() const override { return bytes_landed_; }
  int wait_fd() const override { return socket_.get(); }
  bool arm() override { return opened_begin_ == opened_end_; }
  bool wants_write() const override { return !broken_ && out_begin_ != out_end_; }
  std::string_view transport() const override { return tls_ ? "tcp+tls" : "tcp"; }
  std::string describe() const override { return description_; }

 private:
  static constexpr std::size_t kMaxInFlight = 1024;  // a power of two

  struct InFlight {
    std::uint64_t wr_id = 0;
    std::byte* local = nullptr;
    std::uint64_t run_bytes = 0;
    std::uint64_t local_stride = 0;
    std::uint64_t total = 0;
  };

  InFlight& front() { return ring_[head_ % kMaxInFlight]; }
  void push(const ReadOp& op);
  Completion pop(OpStatus status);
  void flush();
  ssize_t send_some(std::span<const std::byte> bytes);
  ssize_t receive_some(std::span<const iovec> parts);
  // Receives once, into the destination of the oldest op and the header after it. False: nothing
  // came.
  bool receive();
  // Call this when the header is whole. It completes failed and empty ops, or opens the payload.
  std::optional<Completion> take_header();
  void land(std::uint64_t bytes);
  void break_path(OpStatus status, std::string_view why);

  UniqueFd socket_;
  const std::unique_ptr<DataTls> tls_;
  // What TLS has opened and nobody has taken. One record fits.
  std::vector<std::byte> opened_;
  std::size_t opened_begin_ = 0;
  std::size_t opened_end_ = 0;
  std::string description_;
  // Set once the stream has broken: ops in flight end with it.
  std::optional<OpStatus> broken_;
  std::string broken_reason_;

  std::vector<InFlight> ring_;
  std::size_t head_ = 0;
  std::size_t count_ = 0;

  // Encoded requests that the socket has not taken.
  std::vector<std::byte> out_;
  std::size_t out_begin_ = 0;
  std::size_t out_end_ = 0;

  std::array<std::byte, kResponseBytes> header_;
  std::size_t header_used_ = 0;
  bool in_payload_ = false;  // of front()
  std::uint64_t run_ = 0;    // where the payload stands
  std::uint64_t run_landed_ = 0;
  std::uint64_t payload_left_ = 0;
  std::uint64_t bytes_landed_ = 0;
};

}  // namespace rekindle::transport::tcp
