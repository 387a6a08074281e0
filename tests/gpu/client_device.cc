#include "tests/gpu/client_device.h"

#include <stdexcept>

#include "src/bucket/double_device.h"
#if REKINDLE_WITH_CUDA
#include "src/cuda/cuda_device.h"
#include "tests/support/must.h"
#endif

namespace rekindle::testing {

namespace {

class DoubleClientDevice final : public ClientDevice {
 public:
  explicit DoubleClientDevice(const std::string& name)
      : device_(bucket::make_double_device(name, 8ull << 30)),
        stream_(must(device_->make_stream())) {}
  bucket::Device& device() override { return *device_; }
  bucket::Stream& stream() override { return *stream_; }
  void* native_stream() const override { return nullptr; }

 private:
  const std::unique_ptr<bucket::Device> device_;
  const std::unique_ptr<bucket::Stream> stream_;
};

#if REKINDLE_WITH_CUDA
class CudaClientDevice final : public ClientDevice {
 public:
  explicit CudaClientDevice(int ordinal)
      : device_(must(cuda::open_device(must(cuda::Driver::load()), ordinal))),
        context_(static_cast<cuda::CudaDevice&>(*device_).context()) {
    if (context_->run([&] {
          return context_->api().stream_create(&native_, CU_STREAM_NON_BLOCKING);
        }) != CUDA_SUCCESS) {
      throw std::runtime_error("no stream");
    }
    stream_ = must(device_->borrow_stream(native_));
  }
  ~CudaClientDevice() override {
    stream_.reset();
    context_->run([&] { return context_->api().stream_destroy(native_); });
  }
  bucket::Device& device() override { return *device_; }
  bucket::Stream& stream() override { return *stream_; }
  void* native_stream() const override { return native_; }

 private:
  const std::unique_ptr<bucket::Device> device_;
  const std::shared_ptr<const cuda::Context> context_;
  CUstream native_ = nullptr;
  std::unique_ptr<bucket::Stream> stream_;
};
#endif

}  // namespace

std::unique_ptr<ClientDevice> ClientDevice::open(const std::string& name) {
  if (bucket::is_double(name)) return std::make_unique<DoubleClientDevice>(name);
#if REKINDLE_WITH_CUDA
  return std::make_unique<CudaClientDevice>(std::stoi(name.substr(name.find(':') + 1)));
#else
  throw std::runtime_error("built without CUDA");
#endif
}

}  // namespace rekindle::testing
