#include "recovery/rpc/otlp_exporter.h"

#include <atomic>
#include <deque>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include <boost/asio/io_context.hpp>
#include <boost/asio/ip/tcp.hpp>
#include <boost/beast/core/flat_buffer.hpp>
#include <boost/beast/http.hpp>
#include <gtest/gtest.h>
#include <nlohmann/json.hpp>

namespace rekindle::rpc {
namespace {

namespace asio = boost::asio;
namespace http = boost::beast::http;
using namespace std::chrono_literals;

// A collector that answers each request as its script says, then with 200.
class FakeCollector {
 public:
  static constexpr int kClose = 0;
  static constexpr int kSilence = -1;

  explicit FakeCollector(std::deque<int> script = {})
      : script_(std::move(script)), thread_([this] { serve(); }) {}
  ~FakeCollector() {
    stop_ = true;
    asio::ip::tcp::socket wake(io_);
    boost::system::error_code ignored;
    wake.connect(acceptor_.local_endpoint(), ignored);
    wake.close(ignored);
    thread_.join();
  }
  OtlpTarget target() const {
    return *OtlpTarget::parse(
        fmt::format("http://127.0.0.1:{}", acceptor_.local_endpoint().port()));
  }
  std::vector<std::string> bodies() const {
    const std::lock_guard lock(mutex_);
    return bodies_;
  }
  std::size_t requests() const { return requests_; }

 private:
  void serve() {
    std::vector<asio::ip::tcp::socket> silent;
    while (!stop_) {
      asio::ip::tcp::socket socket = acceptor_.accept();
      boost::beast::flat_buffer buffer;
      boost::system::error_code error;
      while (!stop_) {
        http::request<http::string_body> request;
        http::read(socket, buffer, request, error);
        if (error) break;
        ++requests_;
        int status = 200;
        if (!script_.empty()) {
          status = script_.front();
          script_.pop_front();
        }
        if (status == kClose) break;
        if (status == kSilence) {
          silent.push_back(std::move(socket));
          break;
        }
        if (status < 300) {
          EXPECT_EQ(request.target(), "/v1/traces");
          EXPECT_EQ(request[http::field::content_type], "application/json");
          const std::lock_guard lock(mutex_);
          bodies_.push_back(request.body());
        }
        http::response<http::string_body> response{static_cast<http::status>(status), 11};
        response.body() = "{}";
        response.prepare_payload();
        http::write(socket, response, error);
        // One connection at a time: the next client must get its turn.
        if (error || !request.keep_alive()) break;
      }
    }
  }

  asio::io_context io_;
  asio::ip::tcp::acceptor acceptor_{io_, {asio::ip::make_address("127.0.0.1"), 0}};
  std::deque<int> script_;
  std::atomic<bool> stop_ = false;
  std::atomic<std::size_t> requests_ = 0;
  mutable std::mutex mutex_;
  std::vector<std::string> bodies_;
  std::thread thread_;
};

trace::Span span(int number) {
  trace::Span made;
  made.context = {trace::TraceId::random(), trace::SpanId::random()};
  made.name = std::to_string(number);
  return made;
}

OtlpExporter::Options quick(std::chrono::milliseconds deadline = 20s) {
  OtlpExporter::Options options;
  options.gather = 1ms;
  options.pause = 1ms;
  options.deadline = deadline;
  return options;
}

template <typename Fact>
bool eventually(Fact fact) {
  const TimePoint give_up = steady_now() + 30s;
  while (!fact() && steady_now() < give_up) std::this_thread::sleep_for(1ms);
  return fact();
}

TEST(OtlpTarget, IsAnHttpUrlWithThePathOfTraces) {
  const auto target = OtlpTarget::parse("http://localhost:4318");
  ASSERT_TRUE(target);
  EXPECT_EQ(target->server.to_string(), "localhost:4318");
  EXPECT_EQ(target->path, "/v1/traces");
  EXPECT_EQ(OtlpTarget::parse("http://[::1]:4318/")->path, "/v1/traces");
  EXPECT_EQ(OtlpTarget::parse("http://a:1/otlp/v1/traces")->path, "/otlp/v1/traces");
  for (const char* bad : {"", "a:4318", "http://", "http://a", "https://a:4318", "ftp://a:1",
                          "http://a:1/x y", "http://a:1/\r\nX: y"}) {
    const auto refused = OtlpTarget::parse(bad);
    ASSERT_FALSE(refused) << bad;
    EXPECT_EQ(refused.error().code(), ErrorCode::kInvalid) << bad;
    EXPECT_TRUE(refused.error().message().starts_with("--otlp")) << refused.error().message();
  }
}

TEST(OtlpExporter, SendsSpansInBatches) {
  FakeCollector collector;
  OtlpExporter::Options options = quick();
  options.batch = 10;
  OtlpExporter exporter(collector.target(), options);
  for (int i = 0; i < 25; ++i) exporter.add(span(i));
  ASSERT_TRUE(eventually([&] { return exporter.sent() == 25; }));
  EXPECT_EQ(exporter.dropped(), 0u);
  std::vector<std::string> names;
  for (const std::string& body : collector.bodies()) {
    const auto json = nlohmann::json::parse(body);
    const auto& spans = json.at("resourceSpans").at(0).at("scopeSpans").at(0).at("spans");
    EXPECT_LE(spans.size(), 10u);
    for (const auto& one : spans) names.push_back(one.at("name"));
  }
  ASSERT_EQ(names.size(), 25u);
  for (int i = 0; i < 25; ++i) EXPECT_EQ(names[static_cast<std::size_t>(i)], std::to_string(i));
}

TEST(OtlpExporter, TriesAgainWhatACollectorDidNotTake) {
  FakeCollector collector({FakeCollector::kClose, 503, 429, FakeCollector::kSilence});
  OtlpExporter exporter(collector.target(), quick(200ms));
  exporter.add(span(0));
  ASSERT_TRUE(eventually([&] { return exporter.sent() == 1; }));
  EXPECT_EQ(exporter.dropped(), 0u);
  EXPECT_GE(collector.requests(), 5u);
}

TEST(OtlpExporter, DropsWhatACollectorRefuses) {
  FakeCollector collector({400});
  OtlpExporter exporter(collector.target(), quick());
  exporter.add(span(0));
  ASSERT_TRUE(eventually([&] { return exporter.dropped() == 1; }));
  exporter.add(span(1));
  ASSERT_TRUE(eventually([&] { return exporter.sent() == 1; }));
}

TEST(OtlpExporter, CountsSpansThatFindTheQueueFull) {
  OtlpExporter::Options options = quick();
  options.queue = 4;
  OtlpExporter exporter(*OtlpTarget::parse("http://127.0.0.1:1"), options);
  for (int i = 0; i < 10; ++i) exporter.add(span(i));
  EXPECT_EQ(exporter.dropped(), 6u);
  EXPECT_EQ(exporter.sent(), 0u);
}

// The test would not end otherwise.
TEST(OtlpExporter, EndsWhileTheCollectorIsSilentOrAway) {
  FakeCollector collector(std::deque<int>(1000, FakeCollector::kSilence));
  OtlpExporter stalled(collector.target(), quick(200ms));
  stalled.add(span(0));
  ASSERT_TRUE(eventually([&] { return collector.requests() > 0; }));
  OtlpExporter refused(*OtlpTarget::parse("http://127.0.0.1:1"), quick());
  refused.add(span(0));
}

TEST(OtlpExporter, SendsWhatIsLeftAtItsEnd) {
  FakeCollector collector;
  OtlpExporter::Options options = quick();
  options.gather = 1h;
  {
    OtlpExporter exporter(collector.target(), options);
    for (int i = 0; i < 3; ++i) exporter.add(span(i));
  }
  EXPECT_EQ(collector.bodies().size(), 1u);
}

}  // namespace
}  // namespace rekindle::rpc
