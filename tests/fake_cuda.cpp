// What PyTorch's CPU build lacks to trace tensors of a device it has no kernels for: a guard of the device, and the hooks
// by which autograd finds out that there is an accelerator. Nothing is computed (tests/fake_cuda.py).
#include <ATen/Context.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <ATen/native/transformers/attention.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

namespace {
using namespace c10;

struct Guard final : impl::DeviceGuardImplInterface {
  DeviceType type() const override { return DeviceType::CUDA; }
  Device exchangeDevice(Device) const override { return getDevice(); }
  Device getDevice() const override { return Device(DeviceType::CUDA, 0); }
  void setDevice(Device) const override {}
  void uncheckedSetDevice(Device) const noexcept override {}
  Stream getStream(Device d) const noexcept override { return Stream(Stream::DEFAULT, d); }
  Stream getDefaultStream(Device d) const override { return Stream(Stream::DEFAULT, d); }
  Stream getNewStream(Device d, int) const override { return Stream(Stream::DEFAULT, d); }
  Stream exchangeStream(Stream s) const noexcept override { return s; }
  DeviceIndex deviceCount() const noexcept override { return 1; }
  void record(void**, const Stream&, DeviceIndex, EventFlag) const override {}
  void block(void*, const Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  bool queryStream(const Stream&) const override { return true; }
  void destroyEvent(void*, DeviceIndex) const noexcept override {}
};

struct Hooks final : at::CUDAHooksInterface {
  explicit Hooks(at::CUDAHooksArgs) {}
  void init() const override {}
  bool hasCUDA() const override { return true; }
  bool isAvailable() const override { return true; }
  bool isBuilt() const override { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  DeviceIndex getCurrentDevice() const override { return 0; }
  DeviceIndex deviceCount() const override { return 1; }
};

Guard guard;

// The attention kernel that CUDA's build takes on a GPU of compute capability 8 or 9, as far as what the tests ask.
int64_t attention_kernel(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
                         const std::optional<at::Tensor>& mask, double dropout, bool causal, std::optional<double>,
                         bool) {
  auto& context = at::globalContext();
  const auto width = query.size(-1), value_width = value.size(-1);
  const bool half = query.scalar_type() == at::kHalf || query.scalar_type() == at::kBFloat16;
  const bool single = query.scalar_type() == at::kFloat;
  const bool dense = query.dim() == 4 && query.stride(-1) == 1 && key.stride(-1) == 1 && value.stride(-1) == 1;
  const bool square = !causal || query.size(-2) == key.size(-2);
  const auto multiple = half ? 8 : 4;
  const bool aligned = width % multiple == 0 && value_width % multiple == 0;
  for (auto kernel : context.sDPPriorityOrder()) {
    const bool fits =
        kernel == at::SDPBackend::flash_attention
            ? context.userEnabledFlashSDP() && dense && half && !mask && square && width <= 256 && width == value_width
        : kernel == at::SDPBackend::efficient_attention
            ? context.userEnabledMemEfficientSDP() && dense && (half || single) && aligned
        : kernel == at::SDPBackend::cudnn_attention
            ? context.userEnabledCuDNNSDP() && dense && half && aligned && width <= 128 &&
                  std::floor(dropout * 16) == dropout * 16
            : kernel == at::SDPBackend::math && context.userEnabledMathSDP();
    if (fits) return static_cast<int64_t>(kernel);
  }
  return static_cast<int64_t>(at::SDPBackend::error);
}
}  // namespace

namespace at {
C10_REGISTER_TYPED_CLASS(CUDAHooksRegistry, "CUDAHooks", ::Hooks)
}

extern "C" void register_device() {
  impl::device_guard_impl_registry[static_cast<size_t>(DeviceType::CUDA)].store(&guard);
  at::native::_fused_sdp_choice_stub.set_cuda_dispatch_ptr(&attention_kernel);
}
