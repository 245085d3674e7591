# Uses the nvcc of NVIDIA's pip wheels (the extra `nvcc` of pyproject.toml) if there is no other.
# The wheels lack two things that CMake needs: a lib64/ folder, where nvcc looks for cudart, and an
# unversioned libcudart.so for FindCUDAToolkit. Include after find_package(Python) and before
# enabling CUDA.
find_program(nvcc nvcc NO_CMAKE_SYSTEM_PATH NO_CACHE)
if(CMAKE_CUDA_COMPILER OR DEFINED ENV{CUDACXX} OR nvcc OR NOT Python_EXECUTABLE)
  return()
endif()

# An isolated build hides the environment's own packages from sys.path, but not from sysconfig.
execute_process(
  COMMAND ${Python_EXECUTABLE} -P -c
          "import sys, sysconfig; print(*sys.path, sysconfig.get_path('purelib'), sep=';')"
  OUTPUT_VARIABLE site_packages OUTPUT_STRIP_TRAILING_WHITESPACE COMMAND_ERROR_IS_FATAL ANY)
find_program(wheel_nvcc nvcc PATHS ${site_packages} PATH_SUFFIXES nvidia/cu13/bin NO_DEFAULT_PATH
                                                                          NO_CACHE)
if(NOT wheel_nvcc)
  return()
endif()
get_filename_component(wheel_cuda "${wheel_nvcc}/../.." ABSOLUTE)

# One part per wheel. JAX's own CUDA dependencies bring some of them.
foreach(part nvvm/bin/cicc include/crt/host_config.h include/cuda_runtime.h include/cccl/nv/target
             lib/libcudart_static.a)
  if(NOT EXISTS "${wheel_cuda}/${part}")
    message(WARNING "The nvcc in ${wheel_cuda} is not used because ${part} is missing there: "
                    "pip install every wheel of the extra 'nvcc' (pyproject.toml).")
    return()
  endif()
endforeach()

message(STATUS "Using the nvcc of the pip wheels in ${wheel_cuda}")
file(GLOB libcudart "${wheel_cuda}/lib/libcudart.so.*")
list(GET libcudart 0 libcudart)
set(CMAKE_CUDA_COMPILER "${wheel_nvcc}" CACHE FILEPATH "CUDA compiler")
set(CUDA_CUDART "${libcudart}" CACHE FILEPATH "CUDA runtime library")
set(ENV{CUDAFLAGS} "$ENV{CUDAFLAGS} -L${wheel_cuda}/lib")
